"""Protocols of the byte processes of remote memory, with one another and with their agent."""
