"""Generate pages of the site from code and data."""
