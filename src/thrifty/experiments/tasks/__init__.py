"""Tasks that several studies train on."""
