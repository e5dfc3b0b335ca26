"""Prompt sources: JSONL and Parquet files, generated tasks, and a resumable shuffled order."""
