"""Benchmarks: `draftloop bench`, its prompts, and the files of numbers it writes."""
