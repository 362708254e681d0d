"""Parameter-efficient fine-tuning: train few parameters of a pretrained model."""
