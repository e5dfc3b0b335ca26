"""Items of training algorithms: pure functions, a file each with its options. Nothing here imports torch at its top."""
