"""Options of tables onto ranks: packing, exchange, a bound, enumeration. Numbers only."""
