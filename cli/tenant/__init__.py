"""Tenants: whose jobs count against which quota, and which users may submit for which tenant.

Without a command: `agentctl tenant list`. A user submits for a tenant that has the user; what operators submit counts
against any. Only operators change tenants. `agentctl quota TENANT N` sets a quota, too."""
