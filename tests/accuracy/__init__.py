"""The estimator against recorded runs on real GPUs: `python -m tests.accuracy FILE.jsonl [--only GLOB] [--json]`."""
