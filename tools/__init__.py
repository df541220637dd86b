"""Programs that make the site: hooks of mkdocs, and the executed tutorials."""
