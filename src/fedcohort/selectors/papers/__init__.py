"""The selectors of the five papers, each as published."""
