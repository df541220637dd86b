"""Callbacks for other people's trainers. Each module needs a library of its own, and is imported only when asked for."""
