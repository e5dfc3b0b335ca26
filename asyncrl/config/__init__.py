"""The one typed tree of options and every check of it."""
