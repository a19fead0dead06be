"""Makes drafters: records what a target says, trains on its hidden states, and writes what the engine loads."""
