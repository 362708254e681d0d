"""Changes to models: module surgery, residual branches, parameter kinds, attention sites, LoRA layers."""
