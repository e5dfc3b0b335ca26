"""Files that survive a power cut."""
