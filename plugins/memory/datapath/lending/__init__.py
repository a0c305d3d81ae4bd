"""`slabd`: the process that lends this host's memory."""
