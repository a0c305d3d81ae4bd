"""Who acts in a simulated rack: people, administrators, strangers, and what users run."""
