"""Producer, consumer, admin and bounded readers: one core over asyncio and blocking connections."""
