"""Memory of this host: how much there is, and pages that processes share."""
