"""How long an epoch takes (`cost`), which hosts should work and which serve (`search`), who holds which whole blocks
(`blocks`), and how to get there (`plan`)."""
