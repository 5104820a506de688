"""The pure cores of security: principals, ACLs, quotas and the rules for requests. No I/O."""
