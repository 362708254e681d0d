"""Model growth and layer dropping: train fewer blocks in some or all steps."""
