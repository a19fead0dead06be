"""HTTP serving: the API in this process, the engine in its own. Nothing here imports torch but the engine's process."""
