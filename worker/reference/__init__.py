"""A small GPT trainer that uses all of rsup.worker: `python -m rsup.worker.reference.train`."""
