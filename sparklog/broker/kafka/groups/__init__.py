"""The requests of Kafka's protocol about consumer groups: members, offsets and administration.

Each module checks one kind of request, passes it to the group's coordinator, and builds the response.
"""
