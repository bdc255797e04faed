"""IP addresses in one spelling, and their networks: for clients, proxies and policies."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: Prefix length of an address's network, by IP version: the usual allocation to one site.
_NETWORK_BITS = {4: 24, 6: 48}
#: Prefix length of the largest network that is not a large part of the Internet, by IP version.
_NARROW_BITS = {4: 16, 6: 32}
#: The first 96 bits of ``64:ff9b::/96``, in which a NAT64 embeds IPv4 addresses (RFC 6052, section 2.1).
_NAT64 = int(IPv6Address("64:ff9b::")) >> 32
#: Addresses that no NAT64 may embed (RFC 6052, section 3.1). Because a packet from one is forged, it counts neither
#: as a trusted proxy nor as an internal caller. Addresses for documentation and tests are unmapped as usual.
_NOT_TRANSLATED = [
    IPv4Network(text)
    for text in "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.168.0.0/16".split()
]


def unmap(address: Address) -> Address:
    """Return the IPv4 address in ``::ffff:203.0.113.7`` or ``64:ff9b::203.0.113.7``; any other address unchanged.

    A /64 mask would put all of them into one counter. ``64:ff9b:1::/48`` is not unmapped, as each network chooses the
    place of the IPv4 address (RFC 8215), nor are 6to4 and Teredo, whose IPv4 address is a router's or a NAT's.
    """
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    number = int(address)
    if number >> 32 != _NAT64:
        return address
    translated = IPv4Address(number & 0xFFFFFFFF)
    return address if any(translated in network for network in _NOT_TRANSLATED) else translated


def unmap_network(network: Network) -> Network:
    """Return ``::ffff:203.0.113.0/120`` and ``64:ff9b::203.0.113.0/120`` as 203.0.113.0/24; any other unchanged.

    ``64:ff9b::/96`` too is unchanged: it would be all of IPv4.
    """
    if network.prefixlen < 96:
        return network
    first = unmap(network.network_address)
    if network.version == first.version:
        return network
    return IPv4Network((int(first), network.prefixlen - 96))


def network_from(bits: int, hosts: int, number: int) -> Network:
    """Return the network of this address length and number of host bits; ``number`` is the other bits."""
    return (IPv4Network if bits == 32 else IPv6Network)((number << hosts, bits - hosts))


def network_of(address: Address) -> str:
    """Return the /24 or the IPv6 /48 of an address as text."""
    kind = IPv4Network if isinstance(address, IPv4Address) else IPv6Network
    return str(kind((int(address), _NETWORK_BITS[address.version]), strict=False))


def named_network(name: str) -> Network | None:
    """Return the network, or the address as one, that ``203.0.113.0/24`` or ``ip:203.0.113.0/24`` names."""
    try:
        return ip_network(name.removeprefix("ip:"), strict=False)
    except ValueError:
        return None


def networks_around(network: Network) -> list[str]:
    """Return the names of a network and of all wider ones, such as ``ip:203.0.113.0/24``."""
    return [f"ip:{network.supernet(new_prefix=bits)}" for bits in range(network.prefixlen + 1)]


def is_wide(name: str) -> bool:
    """Return whether the name is that of a network wider than /16, or IPv6 /32."""
    network = named_network(name)
    if network is None:
        return False
    network = unmap_network(network)
    return network.prefixlen < _NARROW_BITS[network.version]


def is_within(inner: Network | None, outer: Network) -> bool:
    """Return whether all of the inner network's addresses are the outer's, too."""
    return inner is not None and inner.version == outer.version and inner.subnet_of(outer)  # type: ignore[arg-type]
