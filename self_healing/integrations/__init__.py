"""Plugins for programs that make a Trainer of their own; each imports its program, and nothing else imports it."""
