// Stands in for Spark's module of security tokens for Kafka where that cannot be had: the same classes as far as the
// connector calls them, and no security. Good for brokers on loopback that ask for none, and for nothing else.
package org.apache.spark.kafka010

import java.util.{HashMap, Map => Settings}

import org.apache.spark.SparkConf

/** Never made: there are no clusters with tokens. */
final class KafkaTokenClusterConf private ()

/** Settings of a client, put together step by step. */
class KafkaConfigUpdater(module: String, kafkaParams: Map[String, Object]) {
  private val settings = new HashMap[String, Object]
  for ((name, value) <- kafkaParams) settings.put(name, value)

  private def changed(change: => Unit): this.type = { change; this }

  def set(name: String, value: Object): this.type = changed(settings.put(name, value))

  def setIfUnset(name: String, value: Object): this.type = changed(settings.putIfAbsent(name, value))

  def setAuthenticationConfigIfNeeded(): this.type = changed(())

  def setAuthenticationConfigIfNeeded(cluster: Option[KafkaTokenClusterConf]): this.type = changed(())

  def build(): Settings[String, Object] = settings
}

object KafkaTokenUtil {
  def findMatchingTokenClusterConfig(conf: SparkConf, bootstrapServers: String): Option[KafkaTokenClusterConf] = None

  def needTokenUpdate(settings: Settings[String, Object], cluster: Option[KafkaTokenClusterConf]): Boolean = false
}

/** Nothing is secret here. */
object KafkaRedactionUtil {
  def redactParams(kafkaParams: Seq[(String, Object)]): Seq[(String, String)] =
    for ((name, value) <- kafkaParams) yield name -> s"$value"
}
