"""Our own selectors."""
