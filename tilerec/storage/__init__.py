"""Where the rows of tables live."""
