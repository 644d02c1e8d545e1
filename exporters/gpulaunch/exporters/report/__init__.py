"""A run as a document: what held it back first. And two runs side by side."""
