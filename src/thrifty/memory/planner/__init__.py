"""Choose, for every saved activation, whether it is kept, recomputed, quantized or offloaded."""
