"""Stands where pip looks for the build tool of vLLM's source package, which is unpacked and not built."""
