"""The hand-off of a prompt's records from a prefill worker to a decode worker.

The primitives of one hand-off, by the process that runs them, in the order of their use. [r] marks
those that are calls to another process.

Router: owns the reservation. It reserves right before it submits the prompt, and it aborts.
    reserve [r]   room for a prompt on the decode worker; answers a nonce     Reservations.reserve
    submit  [r]   the prompt and the nonce to the prefill worker              PrefillSide.start
    abort   [r]   free all that an attempt holds, on both workers              Reservations.abort
    fence   [r]   begin the next epoch of a worker; drop all of the old one   Reservations.fence

Prefill worker, on the engine's thread: never blocks.
    begin         the records are allocated and can be read                   OutgoingHandoff.begin
    has           whether the receiver has an item: then it is not encoded    OutgoingHandoff.has
    offer         the bytes of these items are final                          OutgoingHandoff.offer
    stage         copy items from a device to the host                        ArenaSource.stage

Prefill worker, on the io loop: a Sender for each hand-off, a Channel for each pair of workers.
    attach  [r]   take the reservation over; answers the items it has         Sender.run
    push          items into the queue of the hand-off                        Sender.offer
    next_frame    pack the next items, as credit allows                       SendQueue.next_frame
    renew   [r]   keep the leases of all hand-offs of a channel               Channel
    restart       after a cut stream: attach again, send missing items        SendQueue.restart
    commit  [r]   the digests of all items and the first token                Sender.finish
    end           give the attachment up with an error                        Sender.end

Decode worker, on the io loop: Receiver, around the rules in Reservations.
    reserve       allocate records; reuse cached blocks of the same prefix    PrefixCache.hold
    attach        move the reservation to a new attachment                    Reservations.attach
    store         verify a frame, copy its items, grant credit                Reservations.store
    renew         extend the lease                                            Reservations.renew
    expire        end reservations whose lease is over                        Reservations.expire
    admit         at the commit, if complete: the engine owns the records     Reservations.commit
    keep          cache the blocks of an admitted prompt under their keys     PrefixCache.keep
    scrub         verify cached blocks; drop damaged ones                     Receiver.scrub
    release       free the records of a reservation that ended                PrefixCache.release

Each file knows one thing: messages (plain data and protobuf), records (items and their addresses),
sender, channel and direct (sending), reservations, receiver and prefix_cache (receiving), control
(a worker as its router calls it), rpc, link and security (transport), stats (what it cost).
"""
