"""Report of a run: HTML page and trace, made from the files in its run folder."""
