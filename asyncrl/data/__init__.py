"""Prompt sources: JSONL and Parquet files, generated tasks, a shuffled order that resumes."""
