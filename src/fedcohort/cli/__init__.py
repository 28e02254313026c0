"""The command line: ``app.py`` registers, one file per command, ``output.py`` is shared."""
