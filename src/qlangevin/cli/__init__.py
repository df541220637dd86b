"""The command line ``qlangevin``: `main` parses and dispatches, `commands` defines the commands, `display` prints results."""
