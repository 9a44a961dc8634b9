"""Adapters from the engine contract to engines that are reached over HTTP."""
