"""Security in a broker: logins, authorization, quotas and the audit log."""
