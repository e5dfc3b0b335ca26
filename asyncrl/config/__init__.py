"""The typed tree of options, and its checks."""
