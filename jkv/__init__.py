"""The KV and state cache of a JAX model's decode loop."""
