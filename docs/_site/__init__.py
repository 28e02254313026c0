"""The pages of the site that are written from code and data while it is built."""
