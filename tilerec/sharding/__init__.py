"""Tables cut in tiles, and the runtime that reads and updates them on many ranks."""
