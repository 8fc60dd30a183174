"""What a plan costs: work of tables, bytes that travel, seconds and memory; and the options it prices."""
