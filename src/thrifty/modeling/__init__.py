"""Changes of a model: module surgery, residual branches, parameter kinds, attention sites, LoRA layers."""
