"""LoRA adapters in a sync session: received, applied, merged, and several versions served at once."""
