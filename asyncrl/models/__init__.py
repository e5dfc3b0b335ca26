"""Models: the native decoder with its MTP layers, those of transformers, their checkpoints, and small ones to try."""
