"""What everything else is made of: errors, arrays, parameters, registries, signals, clients, the selector protocol."""
