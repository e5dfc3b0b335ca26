"""The native decoder: Qwen2/Qwen3/Llama trunks with MiMo-style MTP layers, and small checkpoints for it."""
