"""The handlers of client and follower requests, and the dispatch of requests to them."""
