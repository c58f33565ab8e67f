"""The command line: one thin file per command. Heavy libraries are imported inside the commands alone."""
