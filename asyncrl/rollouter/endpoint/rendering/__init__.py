"""Conversations as token ids and back: everything about a checkpoint's chat template."""
