"""The foundation: errors, arrays, parameters, registries, signals, clients, the selector protocol."""
