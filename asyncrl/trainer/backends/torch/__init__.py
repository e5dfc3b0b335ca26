"""The FSDP2 backend."""
